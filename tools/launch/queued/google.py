"""Access to Google's APIs: tokens of gcloud, or of the machine that this process is on."""

import json
import os
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping

from mesh.errors import UserError
from tools.launch.kubernetes.kubeconfig import Access

TPU_API = "https://tpu.googleapis.com"
_TOKEN = "/computeMetadata/v1/instance/service-accounts/default/token"


class GoogleAccess(Access):
    """An API of Google."""

    def __init__(self, server: str = TPU_API, environment: Mapping[str, str] = os.environ):
        context = None if server.startswith("http://127.0.0.1:") else ssl.create_default_context()
        super().__init__(server, context, {}, "the Cloud TPU API")
        self._environment = environment

    def _new_token(self) -> str:
        try:
            command = ["gcloud", "auth", "print-access-token", "--quiet"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
            return done.stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return self._of_machine()

    def _of_machine(self) -> str:
        host = self._environment.get("GCE_METADATA_HOST", "metadata.google.internal")
        asked = urllib.request.Request(f"http://{host}{_TOKEN}", headers={"Metadata-Flavor": "Google"})
        try:
            with urllib.request.urlopen(asked, timeout=3) as answer:
                return json.load(answer)["access_token"]
        except (urllib.error.URLError, OSError, ValueError, KeyError):
            raise UserError(
                "no credentials for Google Cloud: `gcloud auth login` makes some; --dry-run DIR needs none"
            ) from None
