# SPDX-License-Identifier: Apache-2.0
"""`dmi view`: a local page to look at captures. Needs the extra `view`; neither vllm nor torch."""
