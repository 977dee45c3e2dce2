#!/bin/sh
# have_compiler.sh PYTHON: succeeds if a C extension for that interpreter can be compiled and linked here.
set -u

directory=$(mktemp -d) || exit 1
trap 'rm -rf "$directory"' EXIT
cat >"$directory/probe.c" <<'END'
#include <Python.h>
int main(void) { return 0; }
END
"$1" - "$directory" <<'END' >/dev/null 2>&1
import os, shlex, subprocess, sys, sysconfig
compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
include = sysconfig.get_paths()["include"]
source, target = (os.path.join(sys.argv[1], name) for name in ("probe.c", "probe.o"))
subprocess.run([*compiler, "-I", include, "-c", source, "-o", target], check=True)
subprocess.run([*compiler, "-shared", target, "-o", target + ".so"], check=True)
END
