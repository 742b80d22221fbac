"""Fine-tuners that need an update of their own."""
