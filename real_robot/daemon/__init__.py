"""The daemon: starts and watches the processes, answers requests on a Unix socket."""
