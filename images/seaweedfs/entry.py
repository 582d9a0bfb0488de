"""Renders SeaweedFS's identities from the environment into memory, then becomes `weed`.

No secret in an argument, and none in the environment of the server.
"""

import json
import os
import shutil

from lab.store.seaweedfs import identities, weed_arguments

CONFIG = "/run/lab/s3.json"

document = identities(
    bucket=os.environ.pop("S3_BUCKET"),
    root_user=os.environ.pop("STORE_ROOT_USER"),
    root_password=os.environ.pop("STORE_ROOT_PASSWORD"),
    access_key_id=os.environ.pop("S3_ACCESS_KEY_ID"),
    secret_access_key=os.environ.pop("S3_SECRET_ACCESS_KEY"),
)
# /run/lab is a tmpfs: the file goes with the container.
descriptor = os.open(CONFIG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
with os.fdopen(descriptor, "w") as file:
    json.dump(document, file)
weed = shutil.which("weed")
if weed is None:
    raise SystemExit("seaweedfs: the image has no `weed`: build it again (make images).")
os.execv(weed, ["weed", *weed_arguments(data="/data", config=CONFIG, s3_bind="0.0.0.0")])
