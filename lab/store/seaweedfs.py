"""SeaweedFS as the lab's store: its identities and its command line. Standard library only.

Used by the embedded runtime (all ports free ones, loopback) and by the image in `images/seaweedfs`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Ports:
    """The ports of one `weed server`. The defaults suit a container, where nothing else listens."""

    s3: int = 9000
    s3_grpc: int = 19000
    master: int = 9333
    master_grpc: int = 19333
    volume: int = 8080
    volume_grpc: int = 18080
    filer: int = 8888
    filer_grpc: int = 18888

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of the ports, in the order of the fields."""
        return tuple(field.name for field in fields(cls))


def identities(
    *, bucket: str, root_user: str, root_password: str, access_key_id: str, secret_access_key: str
) -> dict[str, object]:
    """SeaweedFS's S3 configuration: the store's own account, and the training keys, which reach one bucket.

    Holds secrets: write it to a file of mode 600, never to a log or an argument.
    """
    return {
        "identities": [
            {
                "name": "root",
                "credentials": [{"accessKey": root_user, "secretKey": root_password}],
                "actions": ["Admin", "Read", "Write", "List", "Tagging"],
            },
            {
                "name": "training",
                "credentials": [{"accessKey": access_key_id, "secretKey": secret_access_key}],
                "actions": [f"{action}:{bucket}" for action in ("Read", "Write", "List", "Tagging")],
            },
        ]
    }


def weed_arguments(
    *,
    data: str,
    config: str,
    ports: Ports | None = None,
    s3_bind: str = "127.0.0.1",
    sockets: str | None = None,
    volume_size_mb: int = 256,
) -> list[str]:
    """The arguments of `weed` for one process with everything behind an S3 gateway.

    Args:
        data: folder of the data; it must exist.
        config: file with `identities` as JSON.
        ports: default: the container's, S3 on 9000.
        s3_bind: the address S3 listens on; what lies behind it stays on loopback.
        sockets: folder for the gateway's sockets; default `/tmp`, and a path short enough for a socket.
        volume_size_mb: size at which a volume is full. Small, and not preallocated: a laptop's disk is shared.
    """
    port = ports or Ports()
    folder = sockets or "/tmp"
    return [
        "server",
        f"-dir={data}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        f"-master.port={port.master}",
        f"-master.port.grpc={port.master_grpc}",
        "-master.telemetry=false",
        f"-master.volumeSizeLimitMB={volume_size_mb}",
        "-master.volumePreallocate=false",
        "-master.electionTimeout=1s",
        f"-volume.port={port.volume}",
        f"-volume.port.grpc={port.volume_grpc}",
        "-volume.max=0",  # as many volumes as the disk has room for
        "-volume.preStopSeconds=0",
        "-filer",
        f"-filer.port={port.filer}",
        f"-filer.port.grpc={port.filer_grpc}",
        f"-filer.localSocket={folder}/filer.sock",
        "-s3",
        f"-s3.port={port.s3}",
        f"-s3.port.grpc={port.s3_grpc}",
        f"-s3.ip.bind={s3_bind}",
        f"-s3.config={config}",
        f"-s3.localSocket={folder}/s3.sock",
        "-s3.iam=false",
        "-s3.autoCreateBucket=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
    ]


def stray_sockets(ports: Ports) -> list[str]:
    """Paths of the sockets that `weed` makes in `/tmp` whatever it is told, and may leave there."""
    return [
        f"/tmp/seaweedfs-{part}-grpc-{port}.sock"
        for part, port in (
            ("master", ports.master_grpc),
            ("volume", ports.volume_grpc),
            ("filer", ports.filer_grpc),
            ("s3", ports.s3_grpc),
        )
    ]
