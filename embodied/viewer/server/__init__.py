"""The web server: viser's server with a check of every request, and the page's thread."""
