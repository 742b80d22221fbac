#!/bin/sh
# A browser for the viewer's tests, which are skipped without one. Installed where we may.
for name in chromium chromium-browser google-chrome google-chrome-stable; do
    command -v "$name" >/dev/null && exit 0
done
if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
    export DEBIAN_FRONTEND=noninteractive
    { apt-get -o DPkg::Lock::Timeout=120 update &&
        apt-get -o DPkg::Lock::Timeout=120 install -y --no-install-recommends chromium; } >/dev/null &&
        exit 0
fi
echo "Install chromium and run again: the viewer's tests in a browser are skipped without it." >&2
