"""Pretrained models behind two protocols: pictures and texts in one space, and conversation."""
