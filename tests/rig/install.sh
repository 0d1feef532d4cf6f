#!/bin/sh
# Installs what the rig needs, an OpenSSH server and LXC, as root on Debian or Ubuntu.
# Does nothing where both are there. Services of the packages do not start meanwhile: the rig
# runs an sshd of its own on loopback and wants neither port 22 nor a bridge.
set -eu

rig_complete() {
    for tool in sshd ssh ssh-keygen lxc-start lxc-attach lxc-info lxc-stop perl; do
        PATH="$PATH:/usr/sbin:/sbin" command -v "$tool" >/dev/null 2>&1 || return 1
    done
}

rig_complete && exit 0

if [ "$(id -u)" -ne 0 ]; then
    echo "rig: not root, so openssh-server and lxc are not installed; the rig's tests are left out" >&2
    exit 0
fi
if ! command -v apt-get >/dev/null 2>&1; then
    echo "rig: no apt-get here; install an OpenSSH server, its client and LXC by hand" >&2
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
            openssh-server openssh-client lxc perl-base </dev/null
}
echo "rig: installing openssh-server and lxc"
if ! install_packages >"$log" 2>&1 || ! rig_complete; then
    cat "$log" >&2
    rm -f "$log"
    echo "rig: openssh-server and lxc could not be installed (output above)" >&2
    exit 1
fi
rm -f "$log"
