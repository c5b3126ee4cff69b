"""Makes every Python process that has this folder in PYTHONPATH receive through faulty links (site(1)).

`loads.deployment.Watched` puts it there, and the faults into the environment, so nothing of them is in the processes'
own code.
"""

import os

if given := os.environ.get("OMNI_BUS_FAULTS"):
    import msgspec

    from omni_bus.bus.faulty import Faults, FaultyLink, Shares
    from omni_bus.runtime import driver

    _faults = Faults(os.getpid())
    _faults.set("*", "*", msgspec.json.decode(given, type=Shares))
    _installed = _faults.installed()  # for as long as the process lives: the end of this object would end it
    _installed.__enter__()
    driver.Link = FaultyLink
