#!/bin/sh
# Installs what the rig needs, an OpenSSH server and LXC, and a Chromium for the report's tests, as root on
# Debian or Ubuntu. Does nothing where all are there. Services of the packages do not start meanwhile: the rig
# runs an sshd of its own on loopback and wants neither port 22 nor a bridge.
set -eu

rig_complete() {
    for tool in sshd ssh ssh-keygen lxc-start lxc-attach lxc-info lxc-stop perl; do
        PATH="$PATH:/usr/sbin:/sbin" command -v "$tool" >/dev/null 2>&1 || return 1
    done
}

browser_there() {
    for tool in chromium chromium-browser google-chrome chrome; do
        command -v "$tool" >/dev/null 2>&1 && return 0
    done
    return 1
}

rig_complete && browser_there && exit 0

if [ "$(id -u)" -ne 0 ]; then
    rig_complete || echo "rig: not root, so openssh-server and lxc are not installed; the rig's tests are left out" >&2
    browser_there || echo "rig: not root, so no Chromium is installed; the report is not tested in a browser" >&2
    exit 0
fi
if ! command -v apt-get >/dev/null 2>&1; then
    echo "rig: no apt-get here; install an OpenSSH server, its client, LXC and Chromium by hand" >&2
    exit 0
fi

policy=/usr/sbin/policy-rc.d
kept="$policy.kept-by-rig.$$"
restore() {
    rm -f "$policy"
    if [ -e "$kept" ]; then mv "$kept" "$policy"; fi
}
trap restore EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
if [ -e "$policy" ]; then mv "$policy" "$kept"; fi
printf '#!/bin/sh\nexit 101\n' >"$policy"
chmod 755 "$policy"

log=$(mktemp)
install_packages() {
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq &&
        apt-get install -y -qq --no-install-recommends -o DPkg::Lock::Timeout=120 \
            "$@" </dev/null
}
if ! rig_complete; then
    echo "rig: installing openssh-server and lxc"
    if ! install_packages openssh-server openssh-client lxc perl-base >"$log" 2>&1 || ! rig_complete; then
        cat "$log" >&2
        rm -f "$log"
        echo "rig: openssh-server and lxc could not be installed (output above)" >&2
        exit 1
    fi
fi
# A release without the package (Ubuntu has a snap in its place) only leaves those tests out.
if ! browser_there; then
    echo "rig: installing chromium"
    if ! install_packages chromium >"$log" 2>&1 || ! browser_there; then
        tail -n 3 "$log" >&2
        echo "rig: chromium could not be installed; the report is not tested in a browser" >&2
    fi
fi
rm -f "$log"
