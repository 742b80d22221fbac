"""The worker, which runs under the other Python with its packages, and needs only numpy itself."""
