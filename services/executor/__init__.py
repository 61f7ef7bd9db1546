import os

# Before torch is imported. Threads that spin while they wait for each other starve the other services of the machine,
# and then themselves: on two busy cores a step takes ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
