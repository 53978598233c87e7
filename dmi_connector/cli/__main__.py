# SPDX-License-Identifier: Apache-2.0
"""`python -m dmi_connector.cli` runs the `dmi` command, for environments whose scripts are not on the PATH."""

import sys

from dmi_connector.cli.main import main

sys.exit(main())
