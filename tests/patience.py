"""How long tests wait for what must come, however slow and busy the machine is."""

# What has not come by then hangs: this ends a test that fails, and measures nothing.
PATIENCE_S = 120.0
