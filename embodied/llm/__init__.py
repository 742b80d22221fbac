"""Language models behind one chat protocol: HTTP client, cache, cached answers."""
