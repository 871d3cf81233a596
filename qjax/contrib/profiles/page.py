"""Formats profiles as tables: of the devices, of one device's rules, and all of them as the page docs/profiles.md."""

from collections.abc import Sequence

from qjax.contrib.profiles.base import Profile, get, names
from qjax.support.tables import table


def devices_table() -> str:
    """One line per profile."""
    rows = [(name, get(name).title, get(name).format, get(name).targets[0]) for name in names()]
    return table(("profile", "device", "format", "target"), rows)


def rules_of(profile: Profile) -> list[tuple[str, str, str]]:
    """(topic, requirement, source) for everything that the profile states."""
    scheme = profile.scheme
    found = [
        ("recipe: weights", scheme.weights.text, str(scheme.source)),
        ("recipe: activations", scheme.activations.text, str(scheme.source)),
    ]
    for rule in profile.rules:
        about = ", ".join(sorted(rule.only)) if rule.only else "all"
        found.append((f"{rule.name}: {about}", rule.expected, str(rule.source)))
    return [*found, *(("operators", " ".join(sorted(group.names)), str(group.source)) for group in profile.operators)]


def rules_table(profile: Profile) -> str:
    """The rules of one device, with their sources."""
    lines = [f"{profile.name}: {profile.title}. A violation means that {profile.otherwise}.", profile.proof, ""]
    for about, expected, source in rules_of(profile):
        lines += [about, f"  {expected}", f"  source: {source}"]
    addresses = [f"  {source}: {source.url}" for source in profile.sources]
    return "\n".join([*lines, "", "sources:", *addresses])


def markdown(given: Sequence[str] | None = None) -> str:
    """The generated part of docs/profiles.md. given: the names of the profiles, None for all."""
    listed = names() if given is None else given
    lines = ["| profile | device | file | proposed target | what was run |", "| --- | --- | --- | --- | --- |"]
    for name in listed:
        p = get(name)
        written = f".{p.format}" if p.emits else "none"
        lines.append(f"| `{name}` | {p.title} | {written} | `{p.targets[0]}` | {p.proof} |")
    for name in listed:
        p = get(name)
        lines += ["", f"### {name}", "", f"{p.title}. A violation means that {p.otherwise}.", ""]
        lines += ["| rule | requirement | source |", "| --- | --- | --- |"]
        links = {str(source): f"[{source}]({source.url})" for source in p.sources}
        lines += [f"| {about} | {expected} | {links[source]} |" for about, expected, source in rules_of(p)]
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown())
