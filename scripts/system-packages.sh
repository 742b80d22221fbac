#!/bin/sh
# Off-screen rendering needs EGL: install it where we may, say what is missing where we may not.
if ldconfig -p 2>/dev/null | grep -q libEGL.so.1; then exit 0; fi
wanted="libegl1 libgl1 libgl1-mesa-dri"
if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $wanted >/dev/null && exit 0
fi
echo "Pictures and videos need EGL: install $wanted (Debian, Ubuntu) and run again; training works without." >&2
