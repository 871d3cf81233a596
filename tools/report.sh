#!/usr/bin/env bash
# Rebuilds the script of the report, qjax/reporting/assets, from tools/report/src with the locked npm packages.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/report"
npm ci --no-audit --no-fund --silent
npm run --silent build
