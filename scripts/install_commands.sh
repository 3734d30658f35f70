#!/bin/sh
# Installs commands that tests start, if they are missing: install_commands.sh COMMAND:PACKAGE ...
# The packages are those of Debian and Ubuntu; tests/support/tools.py has the same pairs.
set -eu
PATH=$PATH:/usr/sbin:/sbin
missing=
for pair in "$@"; do
  command -v "${pair%%:*}" >/dev/null 2>&1 || missing="$missing ${pair#*:}"
done
[ -n "$missing" ] || exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
  printf 'Installing%s for the tests\n' "$missing"
  export DEBIAN_FRONTEND=noninteractive
  # A fresh machine has no lists of packages yet.
  # shellcheck disable=SC2086
  { apt-get -qq update && apt-get -qqy install --no-install-recommends $missing >/dev/null; } &&
    exit 0 || printf '\nwarning: apt-get could not install%s\n' "$missing" >&2
fi
printf 'warning: some tests will fail without these packages:%s
Install them as root: apt-get install%s\n' "$missing" "$missing" >&2
