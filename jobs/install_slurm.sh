#!/usr/bin/env bash
# Install Debian's Slurm for `make test-slurm`. This needs root on Debian. No service is started.
set -euo pipefail
packages=(slurmctld slurmd slurm-client munge libpmix2 libpmix-dev)
if command -v dpkg-query > /dev/null && dpkg-query -W "${packages[@]}" > /dev/null 2>&1; then
    exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
    echo "make test-slurm: needs root on Debian, to install ${packages[*]}" >&2
    exit 1
fi
# Debian would start the services of the installed packages. A policy file that returns 101 prevents
# this.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' > "$policy"
    chmod 755 "$policy"
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${packages[@]}"
