# shellcheck shell=bash
# What scripts/demo and scripts/test share: installing what is missing, and the rights to do so. Sourced, not run.

# Where mkfs.btrfs and its like are; not everybody's PATH has it.
export PATH="$PATH:/usr/sbin:/sbin"

say() {
    printf '== %s\n' "$*" >&2
}

fail() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit 1
}

# Runs a command as root: as it is, or with sudo and this environment.
as_root() {
    if [ "$(id -u)" -eq 0 ]; then
        "$@"
    else
        command -v sudo >/dev/null || fail "root is needed for '$1': run this as root, or install sudo"
        sudo -E "$@"
    fi
}

# Of the lines "program package" on stdin the packages whose program is missing, and what has no program to look for.
missing_packages() {
    local program package
    while read -r program package; do
        command -v "$program" >/dev/null || echo "$package"
    done
    [ -e /usr/include/stdio.h ] || echo libc6-dev
    [ -s /etc/ssl/certs/ca-certificates.crt ] || echo ca-certificates
}

# Programs that trialrun's build and its machines need, with their packages.
product_programs() {
    cat <<'END'
cc gcc
git git
mkfs.btrfs btrfs-progs
mmdebstrap mmdebstrap
newuidmap uidmap
END
}

# Programs that the tests need beside those. Suites in machines are compared with the same suites in a virtual environment
# of the distribution's own Python, hence its full path.
test_programs() {
    cat <<'END'
/bin/busybox busybox-static
diff diffutils
docker-registry docker-registry
htpasswd apache2-utils
ip iproute2
make make
openssl openssl
podman podman
ps procps
runc runc
skopeo skopeo
sudo sudo
/usr/bin/python3 python3
END
}

# Installs packages by name.
apt_install() {
    command -v apt-get >/dev/null || fail "missing: $*; install them (there is no apt-get here to do it with)"
    say "installing $*"
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 -qq update
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 -qq install --no-install-recommends --no-remove "$@" >/dev/null
}

apt_has() {
    apt-cache show "$1" >/dev/null 2>&1
}

# Installs what of the list on stdin is missing, if anything is.
install_missing() {
    local missing
    missing=$(missing_packages)
    # shellcheck disable=SC2086 # names of packages, to be split
    [ -z "$missing" ] || apt_install $missing
}

rust_is_new_enough() {
    local have
    have=$(cargo --version 2>/dev/null | cut -d ' ' -f 2) || return 1
    [ -n "$have" ] && [ "$(printf '%s\n' "$1" "${have%%-*}" | sort -V | head -n 1)" = "$1" ]
}

# Finds a Rust that is new enough, or installs one.
need_rust() {
    local want
    want=$(sed -n 's/^rust-version = "\(.*\)"$/\1/p' Cargo.toml)
    export PATH="${CARGO_HOME:-$HOME/.cargo}/bin:$PATH"
    rust_is_new_enough "$want" && return
    if ! command -v rustup >/dev/null && command -v apt-get >/dev/null; then
        # Without lists apt knows no package at all.
        apt_has bash || as_root apt-get -qq update
        apt_has rustup && apt_install rustup
    fi
    if command -v rustup >/dev/null; then
        say "installing the stable Rust with rustup"
        rustup toolchain install stable --profile minimal >&2 || fail "rustup could not install the stable Rust"
        export RUSTUP_TOOLCHAIN=stable
    fi
    rust_is_new_enough "$want" || fail "Rust $want or newer is needed and this system has no package of it:
    install it with rustup (https://rustup.rs), then run this again"
}
