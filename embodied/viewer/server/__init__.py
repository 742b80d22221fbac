"""The web server: viser's server, the authenticating proxy in front of it, the page's thread."""
