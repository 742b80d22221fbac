"""`embodied reward ...`: design rewards, score and label datasets with them, compare them."""
