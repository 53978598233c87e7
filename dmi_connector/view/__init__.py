# SPDX-License-Identifier: Apache-2.0
"""Serves `dmi view`, a local web page that shows captures. Needs the extra `view`, but neither vllm nor torch."""
