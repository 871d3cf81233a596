#!/usr/bin/env bash
# Builds the documentation of every release (the tags v*) and of the present commit into out/versions, one folder each.
# The list of versions in their header is that of the theme, which reads versions.json.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD out=$PWD/out/versions scratch=$(mktemp -d)
trap 'rm -rf "$scratch"; git worktree prune' EXIT
export QJAX_VERSIONS=1
make --no-print-directory venv-docs
rm -rf "$out"
mkdir -p "$out"
names=()
for tag in main $(git tag --list 'v*' --sort=-v:refname); do
    name=${tag#v} from=$root
    if [ "$tag" != main ]; then
        from=$scratch/$name
        git worktree add --quiet --detach "$from" "$tag"
    fi
    (cd "$from" && NO_MKDOCS_2_WARNING=1 "$root/.venv-docs/bin/python" -m mkdocs build --quiet --strict --site-dir "$out/$name")
    (cd "$from" && "$root/.venv-docs/bin/python" -m experiments.notebooks "$out/$name/tutorials")
    names+=("$name")
done
newest=${names[1]:-main}
printf '%s\n' "${names[@]}" | sed 's/.*/{"version": "&", "title": "&", "aliases": []}/' | paste -sd, | sed 's/.*/[&]/' >"$out/versions.json"
printf '<!DOCTYPE html><title>qjax</title><meta http-equiv="refresh" content="0; url=%s/index.html"><a href="%s/index.html">qjax</a>\n' \
    "$newest" "$newest" >"$out/index.html"
ls "$out"
