# Sourced by the scripts in bin/. Installs what is missing and says what; when nothing is missing it takes a few milliseconds.
#
#   . bin/setup.sh server    Debian packages that the server needs, and .venv with the project in it
#   . bin/setup.sh cluster   also what a cluster's processes need
#   . bin/setup.sh peers     also the sandbox tools that `dsec bench` compares with
#   . bin/setup.sh tests     also the tools of tests, Debian's and Python's: three times as much to download
#
# Sets DSEC_ROOT (the checkout) and DSEC_PYTHON. What it installs from Debian goes into the ledger that `dsec host undo` reads.
# shellcheck shell=bash

DSEC_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
DSEC_PYTHON=$DSEC_ROOT/.venv/bin/python

_dsec_say() { printf 'setup: %s\n' "$*" >&2; }

_dsec_fail() {
    _dsec_say "$*"
    exit 1
}

# Debian packages, each known by something that it brings.
_dsec_packages() {
    local missing=()
    command -v cc >/dev/null || missing+=(gcc)
    compgen -G '/usr/lib/*/libc.a' >/dev/null || missing+=(libc6-dev)
    command -v musl-gcc >/dev/null || missing+=(musl-tools)
    command -v mmdebstrap >/dev/null || missing+=(mmdebstrap)
    command -v mkfs.erofs >/dev/null || missing+=(erofs-utils)
    command -v mkfs.btrfs >/dev/null || missing+=(btrfs-progs)
    if [ "$1" = tests ]; then
        command -v docker-registry >/dev/null || missing+=(docker-registry)
        command -v dpkg-scanpackages >/dev/null || missing+=(dpkg-dev)
        command -v git >/dev/null || missing+=(git)
        command -v ip >/dev/null || missing+=(iproute2)
        command -v npm >/dev/null || missing+=(npm)
        command -v systemd-analyze >/dev/null || missing+=(systemd)
        command -v qemu-system-x86_64 >/dev/null || missing+=(qemu-system-x86)
        command -v qemu-img >/dev/null || missing+=(qemu-utils)
        command -v sfdisk >/dev/null || missing+=(fdisk)
        command -v syslinux >/dev/null || missing+=(syslinux syslinux-common)
        [ -d /usr/share/OVMF ] || missing+=(ovmf)
    fi
    if [ "$1" = peers ] || [ "$1" = tests ]; then
        command -v crun >/dev/null || missing+=(crun)
        command -v runc >/dev/null || missing+=(runc)
        command -v bwrap >/dev/null || missing+=(bubblewrap)
    fi
    [ ${#missing[@]} -eq 0 ] || _dsec_install "${missing[@]}"
}

_dsec_install() {
    [ "$(id -u)" = 0 ] || _dsec_fail "needs these packages: $*. As root: apt-get install $*"
    command -v apt-get >/dev/null || _dsec_fail "needs $*, and this system has no apt-get: install them by hand."
    _dsec_say "installing Debian packages: $*"
    local state=${DSEC_STATE:-/var/lib/dsec} log before
    log=$(mktemp) before=$(mktemp)
    dpkg-query -W -f '${Package}\n' | sort >"$before"
    if ! { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends "$@"; } >"$log" 2>&1 </dev/null; then
        tail -n 20 "$log" >&2
        rm -f "$log" "$before"
        _dsec_fail "apt-get could not install $*"
    fi
    [ -d "$state" ] || install -d -m 0700 "$state"
    dpkg-query -W -f '${Package}\n' | sort | comm -13 "$before" - >>"$state/packages"
    rm -f "$log" "$before"
}

# A Python that is new enough, with venv and pip.
_dsec_find_python() {
    local name found=
    for name in python3 python3.14 python3.13 python3.12 python3.11; do
        "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
        found=$name
        "$name" -c 'import ensurepip, venv' 2>/dev/null && { command -v "$name" && return; }
    done
    [ -n "$found" ] || _dsec_fail "needs Python 3.11 or newer."
    _dsec_install python3-venv >&2
    command -v "$found"
}

# Whether .venv has what is asked for: its key names the checkout, pyproject.toml and the extra; `dev` has all others, `cluster` the server's.
_dsec_venv_has() {
    local has
    has=$(cat "$DSEC_ROOT/.venv/.dsec-key" 2>/dev/null) && [ -x "$DSEC_PYTHON" ] || return
    [ "$has" = "$1 $2" ] || [ "$has" = "dev $2" ] || [ "$1 $has" = "server cluster $2" ]
}

# .venv, made again when pyproject.toml or the checkout's place changes, or more is asked for.
_dsec_venv() {
    local venv=$DSEC_ROOT/.venv extra=$1 key python log
    key=$(printf '%s\n' "$DSEC_ROOT" | cat - "$DSEC_ROOT/pyproject.toml" | sha256sum)
    _dsec_venv_has "$extra" "$key" && return
    mkdir -p "$venv"
    (
        flock 9
        _dsec_venv_has "$extra" "$key" && exit 0
        python=$(_dsec_find_python) || exit 1
        _dsec_say "installing Python packages into .venv"
        log=$(mktemp)
        if ! { "$python" -m venv "$venv" && "$DSEC_PYTHON" -m pip install --disable-pip-version-check -q -e "${DSEC_ROOT}[$extra]"; } >"$log" 2>&1 </dev/null; then
            tail -n 20 "$log" >&2
            rm -f "$log"
            _dsec_fail "could not make .venv"
        fi
        rm -f "$log"
        printf '%s %s\n' "$extra" "$key" >"$venv/.dsec-key"
    ) 9>"$venv/.dsec-lock" || exit 1
}

# Packages are installed before there is a Python that can write the ledger: until then a list keeps them.
_dsec_record() {
    local list=${DSEC_STATE:-/var/lib/dsec}/packages
    [ -s "$list" ] || return 0
    "$DSEC_PYTHON" - "$list" <<'PYTHON'
import sys
from pathlib import Path

from dsec.kernel.ledger import Ledger

path = Path(sys.argv[1])
Ledger(path.with_name("host.json")).record("packages", " ".join(path.read_text().split()))
path.unlink()
PYTHON
}

_dsec_packages "$1"
case $1 in
    tests) _dsec_venv dev ;;
    cluster) _dsec_venv cluster ;;
    *) _dsec_venv server ;;
esac
_dsec_record
