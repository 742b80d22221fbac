"""What must be right for an arm that stops and stays inside its limits: see README.md here."""
