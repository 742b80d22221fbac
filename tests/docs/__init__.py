"""Every command and every Python block of README.md and docs/ runs, page by page, at debug size."""
