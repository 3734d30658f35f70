#!/bin/sh
# Makes the virtual environment in $VENV and installs the package with its development tools into it,
# and the commands that the tests need.
set -eu
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}

fail() { printf '\nset-up failed: %s\n' "$1" >&2; exit 1; }

command -v "$PYTHON" >/dev/null 2>&1 ||
  fail "no '$PYTHON' on the PATH. Install Python 3.10 or newer, or name one: make PYTHON=/path/to/python3"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
  fail "$("$PYTHON" --version) is too old: Python 3.10 or newer is needed. Name one: make PYTHON=python3.11"

if [ ! -x "$VENV/bin/python" ]; then
  printf 'Making %s with %s (once)\n' "$VENV" "$("$PYTHON" --version)"
  "$PYTHON" -m venv "$VENV" ||
    fail "'$PYTHON -m venv' did not work. On Debian and Ubuntu: apt-get install python3-venv"
fi
printf 'Installing holdfast and its tools (once; torch is large)\n'
"$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' ||
  fail "pip could not install the packages above. Is a package index reachable, and is there a wheel of
torch $(sed -n 's/^torch==//p' constraints.txt) for $("$PYTHON" --version)? Run it again with: make setup"

sh "$(dirname "$0")/install_commands.sh" strace:strace mount:mount mkfs.ext4:e2fsprogs ip:iproute2 openssl:openssl
