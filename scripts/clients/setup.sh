#!/usr/bin/env bash
# Makes an environment with the clients that the server is tried with, once; nothing where it is
# there already.
#
#     scripts/clients/setup.sh python FOLDER     -> FOLDER/bin/python
#     scripts/clients/setup.sh hub FOLDER        -> FOLDER/bin/python, with huggingface_hub
#     scripts/clients/setup.sh node FOLDER       -> FOLDER/node_modules
#     scripts/clients/setup.sh editor FOLDER     -> FOLDER/node_modules
#
# Exit code 3: the registry cannot be reached, or there is no Python or Node.
set -euo pipefail

python_packages=(openai==3.57.0 langchain-openai==1.7.4)
hub_packages=(huggingface_hub==2.4.0)
# What the editor plugin Continue talks to models with.
editor_packages=(@continuedev/openai-adapters@1.37.0)
node_packages=(openai@7.59.0 playwright-core@1.65.1)

kind="$1" folder="$2"
case "$kind" in
    python) wanted="${python_packages[*]}" ;;
    hub) wanted="${hub_packages[*]}" ;;
    node) wanted="${node_packages[*]}" ;;
    editor) wanted="${editor_packages[*]}" ;;
    *) echo "usage: setup.sh python|hub|node|editor FOLDER" >&2; exit 2 ;;
esac
# Several tests may ask at once.
mkdir -p "$folder"
exec 9>"$folder/.lock"
command -v flock >/dev/null && flock 9
if [ "$(cat "$folder/.made" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi
case "$kind" in
    python | hub)
        read -ra packages <<<"$wanted"
        { python3 -m venv "$folder" && "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"; } >&2 || exit 3
        ;;
    node | editor)
        command -v npm >/dev/null || exit 3
        npm install --prefix "$folder" --no-audit --no-fund --silent $wanted >&2 || exit 3
        ;;
esac
echo "$wanted" >"$folder/.made"
