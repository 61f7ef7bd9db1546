import os

# Must be set before torch is imported. OpenMP threads that spin while they wait for each other take CPU time from the
# other services and from each other: on two busy cores a step then takes ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
