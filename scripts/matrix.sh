#!/bin/sh
# Runs the quick tests on every Python and torch of $ROWS, each in an environment of its own under .matrix/.
#   make matrix                        every row; the environments take about 5 GB each and are kept
#   make matrix ROWS=3.12:2.13.0       one row
#   make matrix STEP=install           the environments only (STEP=test: the tests only)
# A Python is looked for on the PATH (python3.12), then among the versions of pyenv. A row whose Python is not
# installed counts as failed. Outcomes: .matrix/*.log.
set -u
ROWS=${ROWS:-3.10:2.13.0 3.11:2.6.0 3.11:2.9.1 3.11:2.13.0 3.12:2.13.0 3.13:2.13.0}
STEP=${STEP:-all}
JOBS=${JOBS:-2}

find_python() {
  for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python3; do
    # A shim of pyenv is on the PATH even where its version is not switched on: run it to know.
    if "$candidate" -c '' 2>/dev/null; then command -v "$candidate"; return; fi
  done
  echo "no Python $1 was found" >&2
  return 1
}

install() { # python-version torch-version environment
  [ -e "$3/.ready" ] && [ "$3/.ready" -nt pyproject.toml ] && return
  python=$(find_python "$1") && "$python" -m venv "$3" || return 1
  # torch alone is pinned: the versions in constraints.txt do not all exist for the oldest Python.
  "$3/bin/python" -m pip install --quiet --no-cache-dir --disable-pip-version-check "torch==$2" -e '.[dev]' &&
    touch "$3/.ready"
}

failed=0
mkdir -p .matrix
for row in $ROWS; do
  # The path of an environment may not hold a colon.
  environment=.matrix/python${row%:*}-torch${row#*:}
  log=$environment.log
  printf 'Python %s, torch %s: ' "${row%:*}" "${row#*:}"
  if [ "$STEP" != test ]; then
    install "${row%:*}" "${row#*:}" "$environment" > "$log" 2>&1 ||
      { echo "not installed, see $log"; failed=1; continue; }
  fi
  [ "$STEP" = install ] && echo installed && continue
  if PYTHONPATH=$PWD/src "$environment/bin/python" -m pytest -q -n "$JOBS" --dist loadfile -m 'not slow and not browser' > "$log" 2>&1
  then :; else failed=1; fi
  tail -n 1 "$log"
done
exit $failed
