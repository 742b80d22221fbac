#!/bin/sh
# System libraries that pip cannot bring: EGL (MuJoCo pictures), libusb, OpenGL and OpenMP (Open3D),
# and a Vulkan driver (ManiSkill). Installed where we may; otherwise one line says what is missing.
have() { ldconfig -p 2>/dev/null | grep -q "$1"; }
apt_get() { DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=120 "$@" >/dev/null; }

wanted=""
have libEGL.so.1 || wanted="$wanted libegl1 libgl1-mesa-dri"
have libGL.so.1 || wanted="$wanted libgl1"
have libusb-1.0.so.0 || wanted="$wanted libusb-1.0-0"
have libgomp.so.1 || wanted="$wanted libgomp1"
have libvulkan.so.1 || wanted="$wanted libvulkan1"

# ManiSkill on the processor needs Mesa 24.3 or newer; Debian 12 has that in its backports only.
codename=$(. /etc/os-release 2>/dev/null && echo "$VERSION_CODENAME")
release=""
[ "$codename" = bookworm ] && release="-t bookworm-backports"
mesa=$(dpkg-query -W -f '${Version}' mesa-vulkan-drivers 2>/dev/null)
if [ -z "$mesa" ] || ! dpkg --compare-versions "$mesa" ge 24.3; then vulkan=mesa-vulkan-drivers; fi
[ -z "$wanted$vulkan" ] && exit 0

if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
    if [ -n "$vulkan$release" ] && ! grep -rqs bookworm-backports /etc/apt/sources.list*; then
        [ "$codename" = bookworm ] && echo "deb http://deb.debian.org/debian bookworm-backports main" \
            >/etc/apt/sources.list.d/bookworm-backports.list
    fi
    apt_get update
    # shellcheck disable=SC2086  (lists of words)
    { [ -z "$wanted" ] || apt_get install -y $wanted; } &&
        { [ -z "$vulkan" ] || apt_get install -y $release $vulkan; } && exit 0
fi
echo "Install (Debian and Ubuntu names)$wanted${vulkan:+ $vulkan (24.3 or newer; Debian 12: from" \
    "bookworm-backports)} and run again: pictures, point clouds and ManiSkill need them." >&2
