"""Prints what a Ray node installs: the lab's own dependencies and the extra `cluster`, without torch.

torch is installed on its own, from a CPU source; matplotlib draws on the host alone.
"""

import re
import sys
import tomllib

ELSEWHERE = {"torch", "matplotlib"}

with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
for requirement in [*project["dependencies"], *project["optional-dependencies"]["cluster"]]:
    if re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0] not in ELSEWHERE:
        print(requirement)
