"""The options of cluster=kubernetes in `cluster.options`; conf/cluster/kubernetes.yaml says what each means."""

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from pipeline.launch.options import option

JOBSET, JOB = "jobset", "job"
# A name in a cluster (RFC 1123), and one to which "-worker-0-12345-abcde" is added.
NAME = r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"
SHORT_NAME = r"[a-z]([-a-z0-9]{0,34}[a-z0-9])?"
# References without spaces; the registry knows which images there are.
IMAGE = r"[\w.-]+(:\d+)?(/[\w.-]+)*(:[\w.-]+)?(@sha256:[0-9a-f]{64})?"
PORT = r"[1-9]\d{0,3}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d{2}|655[0-2]\d|6553[0-5]"
ADDRESS = rf"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?(:({PORT}))?"
FOLDER = r"(?!.*\.\.)/[\w./-]*\w"
UNITS = {
    prefix + suffix: float(base**power)
    for base, suffix, prefixes in ((1000, "", "kMGTP"), (1024, "i", "KMGTP"))
    for power, prefix in enumerate(prefixes, 1)
}

Value = str | int | float | bool
Values = dict[Annotated[str, Meta(min_length=1)], Value]
Variables = dict[Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*\Z")], Value]
Names = Annotated[tuple[Annotated[str, Meta(pattern=rf"^{NAME}\Z")], ...], option("names of Secrets", "[mine]")]
Labels = Annotated[Values, option("names with a value each", "{name: value}")]
Size = Annotated[str, option("a quantity as 4Gi or 500Mi", "4Gi", r"(?=.*[1-9])\d+(\.\d+)?(k|[MGTP]|[KMGTP]i)?")]


@dataclass(frozen=True)
class KubernetesOptions:
    """The pods to make, and how the driver reaches them."""

    image: Annotated[str, option("an image's name", "registry.example/me/pipeline:1", IMAGE)] | None = None
    kind: Annotated[Literal["jobset", "job"], option(f"{JOBSET} or {JOB}", JOBSET)] = "jobset"
    name: (
        Annotated[str, option("up to 36 small letters, digits and '-', a letter first", "mine", SHORT_NAME)] | None
    ) = None
    namespace: Annotated[str, option("a namespace's name", "training", NAME)] | None = None
    context: Annotated[str, option("a context's name", "null", r".*\S.*")] | None = None
    cpu: Annotated[int, option("whole cores of a pod, from 1", "2", ge=1, le=4096)] = 1
    memory: Size = "4Gi"
    gpus: Annotated[int, option("a pod's GPUs, from 0", "1", ge=0, le=64)] = 0
    gpu_resource: Annotated[
        str, option("a resource's name with its vendor's domain", "nvidia.com/gpu", r"[a-z0-9.-]+/[\w.-]+")
    ] = "nvidia.com/gpu"
    shm: Size = "1Gi"
    claim: Annotated[str, option("the name of a PersistentVolumeClaim", "mine", NAME)] | None = None
    claim_path: Annotated[str, option("a folder of the pods, from / on", "/data", FOLDER)] = "/data"
    workdir: Annotated[str, option("a folder of the image, from / on", "/app", FOLDER)] | None = None
    user: Annotated[int, option("a user's number that is not root's", "1000", ge=1, le=2**31 - 1)] = 1000
    secrets: Names = ()
    env: Annotated[Variables, option("variables with a value each", "{TF_CPP_MIN_LOG_LEVEL: '1'}")] | None = None
    mlflow: (
        Annotated[
            str,
            option("an MLflow server's address without a password", "http://mlflow:5000", r"https?://[^\s/@]+(/\S*)?"),
        ]
        | None
    ) = None
    image_pull_policy: (
        Annotated[Literal["Always", "IfNotPresent", "Never"], option("Always or IfNotPresent or Never", "IfNotPresent")]
        | None
    ) = None
    image_pull_secrets: Names = ()
    node_selector: Labels | None = None
    tolerations: Annotated[tuple[Values, ...], option("a list of tolerations", "[{key: gpu, operator: Exists}]")] = ()
    priority_class: Annotated[str, option("the name of a PriorityClass", "null", NAME)] | None = None
    labels: Labels | None = None
    annotations: Labels | None = None
    network_policy: bool = True
    conductor: Annotated[str, option("HOST or HOST:PORT at which pods reach this command", "null", ADDRESS)] | None = (
        None
    )
    port: Annotated[int, option("a port from 1024 to 64000", "2222", ge=1024, le=64000)] = 2222
    timeout: Annotated[float, option("seconds above 0", "600", gt=0, lt=1e9)] = 600.0
    ttl: Annotated[int, option("seconds from 0", "3600", ge=0, le=10**8)] = 3600

    @property
    def memory_gib(self) -> float:
        """The memory of a pod."""
        return bytes_of(self.memory) / 2**30


def bytes_of(quantity: str) -> float:
    """The bytes that a quantity of Kubernetes stands for.

    >>> bytes_of("4Gi"), bytes_of("500M"), bytes_of("12")
    (4294967296.0, 500000000.0, 12.0)
    """
    number = quantity.rstrip("kKMGTPi")
    return float(number) * UNITS.get(quantity[len(number) :], 1.0)
