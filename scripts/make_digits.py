"""Make lab/training/digits.npz from scikit-learn's copy of the UCI handwritten digits.

Run it with a Python that has scikit-learn and numpy (neither is a dependency of the lab for this):
    python scripts/make_digits.py [TARGET]
The same scikit-learn data gives the same bytes: the archive's members carry a fixed date.
"""

from __future__ import annotations

import io
import sys
import zipfile
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

TARGET = Path(__file__).resolve().parent.parent / "lab" / "training" / "digits.npz"


def main() -> None:
    """Write `images` uint8 (1797, 8, 8) in 0..16 and `labels` uint8 (1797,)."""
    digits = load_digits()
    arrays = {"images": digits.images.astype(np.uint8), "labels": digits.target.astype(np.uint8)}
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, array in arrays.items():
            buffer = io.BytesIO()
            np.save(buffer, array)
            # np.savez would stamp the present time and make every build differ
            archive.writestr(
                zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0)),
                buffer.getvalue(),
                zipfile.ZIP_DEFLATED,
                9,
            )
    print(f"{target}: {target.stat().st_size} bytes, {len(arrays['labels'])} images")


if __name__ == "__main__":
    main()
