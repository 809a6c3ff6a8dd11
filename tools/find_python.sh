#!/bin/sh
# Prints an interpreter that runs, is Python 3.12 or later and can make virtual environments.
# A command may exist and still not run (a pyenv shim, say), so every candidate is tried.

good() {
    "$1" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

for candidate in "${PYTHON_FOR_VENV:-}" python3.13 python3.12 python3.14 python3 python \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python3 \
    "${UV_PYTHON_INSTALL_DIR:-$HOME/.local/share/uv/python}"/cpython-3.1[2-9]*/bin/python3 \
    /opt/homebrew/bin/python3.1[2-9] /usr/local/bin/python3.1[2-9]; do
    if [ -n "$candidate" ] && good "$candidate"; then
        command -v "$candidate"
        exit 0
    fi
done

echo "no Python 3.12 or later with venv found; install one (Debian and Ubuntu: python3.12-venv;" >&2
echo "or: uv python install 3.12; or: pyenv install 3.12), or name it: make PYTHON_FOR_VENV=/path/to/python3.12" >&2
exit 1
