#!/bin/sh
# Prints the path of a Python >= 3.12 that can make virtual environments; explains what to install if there is none.
#
# Order: $PYTHON (and then nothing else), python3.12, 3.13, 3.14, python3 on PATH, pyenv's versions (3.12 and 3.13 first:
# every dependency has wheels for them). Each candidate is run, because a pyenv shim may exist and refuse to.

probe='import sys
if sys.version_info < (3, 12): sys.exit(10)
try:
    import ensurepip, venv
except ImportError:
    print("%d.%d" % sys.version_info[:2]); sys.exit(11)
print(sys.executable)'

no_venv=""

# Prints the interpreter and exits if "$1" will do; remembers one that only lacks its venv module.
try() {
    found=$("$1" -c "$probe" 2>/dev/null </dev/null)
    case $? in
        0) if [ -x "$found" ]; then printf '%s\n' "$found"; exit 0; fi ;;
        11) no_venv=$found ;;
    esac
}

if [ -n "${PYTHON:-}" ]; then
    try "$PYTHON"
    echo "PYTHON=$PYTHON is not a Python >= 3.12 with venv and ensurepip" >&2
    exit 1
fi

for name in python3.12 python3.13 python3.14 python3; do
    if command -v "$name" >/dev/null 2>&1; then try "$name"; fi
done

versions="${PYENV_ROOT:-${HOME:-/nonexistent}/.pyenv}/versions"
for minor in 12 13 14; do
    # Newest patch release first: 3.12.10 before 3.12.9.
    for patch in $(ls "$versions" 2>/dev/null | sed -n "s/^3\.$minor\.\([0-9][0-9]*\)\$/\1/p" | sort -rn); do
        try "$versions/3.$minor.$patch/bin/python"
    done
done

if [ -n "$no_venv" ]; then
    cat >&2 <<END
Python $no_venv is here, but without its venv module. Install it, e.g.
    sudo apt install python$no_venv-venv
END
else
    cat >&2 <<'END'
No Python >= 3.12 found (on PATH or in pyenv's versions). Install one, e.g.
    sudo apt install python3.12 python3.12-venv     # Debian, Ubuntu
    brew install python@3.12                        # macOS
    pyenv install 3.12                              # anywhere
or name one: make PYTHON=/path/to/python3.12 ...
END
fi
exit 1
