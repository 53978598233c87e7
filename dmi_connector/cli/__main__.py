# SPDX-License-Identifier: Apache-2.0
"""`python -m dmi_connector.cli`: the `dmi` command where its script is not on the PATH."""

import sys

from dmi_connector.cli.main import main

sys.exit(main())
