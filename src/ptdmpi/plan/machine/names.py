"""The names by which users can refer to a cluster: the names of the cluster files in the package,
and the names of their devices."""

import difflib
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

# Common name of a device -> name of the preset cluster with such devices.
ALIASES = {
    "a100": "dgx-a100",
    "b200": "dgx-b200",
    "gh200": "alps",
    "h100": "dgx-h100",
    "mi250x": "frontier",
    "v100": "v100-dgx2",
}
FOLDER = ("presets", "clusters")


@cache
def cluster_names() -> tuple[str, ...]:
    """Return the names of the clusters in the package."""
    entries = (entry.name for entry in files("ptdmpi").joinpath(*FOLDER).iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in entries if name.endswith(".toml")))


def legal_clusters() -> str:
    """Return the names of the clusters in the package. If a cluster has an alias, the alias follows
    the name in parentheses."""
    alias = {name: f"{name} ({short})" for short, name in ALIASES.items()}
    return ", ".join(alias.get(name, name) for name in cluster_names())


def preset_file(name: str) -> Traversable | None:
    """Return the file of the preset cluster with this name or alias, or None if there is no such
    cluster. The case of letters does not matter."""
    name = name.lower()
    name = ALIASES.get(name, name)
    if name not in cluster_names():
        return None
    return files("ptdmpi").joinpath(*FOLDER, f"{name}.toml")


def nearest_cluster(name: str) -> str | None:
    """Return the name of the preset cluster that a user who wrote `name` probably meant. This is a
    cluster whose device or name occurs in `name` (for example in "H100-PCIe"), or else the cluster
    with the most similar name. Return None if no name is similar."""
    name = name.lower()
    inside = [cluster for alias, cluster in ALIASES.items() if alias in name]
    # aliases come first, because "gh200" also contains "h200"
    inside += [cluster for cluster in cluster_names() if cluster in name]
    if inside:
        return inside[0]
    known = [*cluster_names(), *ALIASES]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return ALIASES.get(close[0], close[0]) if close else None
