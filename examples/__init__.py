"""Methods in one file each, to read, copy and change; not in the wheel."""
