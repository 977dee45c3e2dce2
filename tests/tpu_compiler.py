"""The TPU compiler in processes of their own, where it is installed: as a package or aside of the packages."""

import pytest

from mesh.topology import find_compiler

needs_tpu_compiler = pytest.mark.skipif(find_compiler() is None, reason="the TPU compiler (libtpu) is not installed")
TPU_COMPILER = {
    "TPU_LIBRARY_PATH": str(find_compiler()),
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
}
