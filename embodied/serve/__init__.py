"""Policies over the network: openpi's websocket protocol, a server, a client, an access token."""
