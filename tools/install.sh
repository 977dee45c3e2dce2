#!/bin/sh
# Installs this checkout into a virtual environment: install.sh VENV EXTRAS, e.g. install.sh .venv rl-pure,dev
#
# Can be repeated and can be interrupted: what is there is kept, a broken environment is made anew. No compiler is needed:
# reasoning-gym comes without its dependencies (the extra rl-pure names the pure ones), and pycosat, which is C source,
# only where a C compiler and Python's headers work.
set -eu

venv=$1
extras=$2
root=$(cd "$(dirname "$0")/.." && pwd)
python="$venv/bin/python"
begin=$(date +%s)
log="$venv/install.log"
say() { printf 'install: %s\n' "$*"; }

pip_install() {
    # No byte code here: most of it is never imported, and compiling it would take half of the whole time.
    if ! "$python" -m pip install -qq --disable-pip-version-check --no-compile \
        -c "$root/constraints.txt" "$@" >"$log" 2>&1 </dev/null; then
        cat "$log" >&2
        say "failed; the messages above say why (they are in $log too). Nothing is lost: run the same command again." >&2
        exit 1
    fi
}

if ! "$python" -c 'import sys, pip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; then
    base=$(sh "$root/tools/find_python.sh")
    say "creating $venv with $("$base" -V)"
    "$base" -m venv --clear "$venv"
fi

say "packages for [$extras] into $venv (the first time takes about half a minute, more on a slow network)"
# A recent pip resolves faster; setuptools and wheel in place spare one isolated build environment per source package.
pip_install --upgrade pip setuptools wheel
pip_install --no-build-isolation -e "$root[$extras]"

case ",$extras," in
*,rl-pure,*)
    pip_install --no-build-isolation --no-deps reasoning-gym
    if ! "$python" -c 'import pycosat' >/dev/null 2>&1; then
        if sh "$root/tools/have_compiler.sh" "$python"; then
            pip_install --no-build-isolation --no-deps pycosat
        else
            say "no C compiler with Python's headers: going on without pycosat (one task family needs it)"
        fi
    fi
    imports="import ray, rl.tasks.reasoning_gym as tasks; tasks.import_reasoning_gym()"
    ;;
*) imports="" ;;
esac

# The TPU compiler for tests and `axl aot`, aside of the packages: jax looks for a TPU at every start where it finds it
# among them (see docs/reference/aot.md). It exists for this platform only, and takes 0.6 GB.
case ",$extras," in
*,dev,*)
    compiler=$(sed -n 's/^libtpu==//p' "$root/constraints.txt")
    if [ -n "$compiler" ] && [ "$(uname -s) $(uname -m)" = "Linux x86_64" ]; then
        if ! [ -f "$venv/libtpu/libtpu-$compiler.dist-info/RECORD" ]; then
            rm -rf "$venv/libtpu"
            pip_install --no-deps --target "$venv/libtpu" "libtpu==$compiler"
        fi
    fi
    ;;
esac

# Byte code of what every process imports, once, even where Python is told not to write any.
PYTHONDONTWRITEBYTECODE='' JAX_PLATFORMS=cpu "$python" -W ignore -c "
import jax, flax.nnx, optax, orbax.checkpoint, grain.python, rich
$imports" </dev/null
rm -f "$log"
say "done in $(($(date +%s) - begin)) s"
