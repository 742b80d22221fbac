"""Archives of past students: Meta-ACL."""
