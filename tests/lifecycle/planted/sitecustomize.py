"""Plants a fault in each Python that finds this: in the holders, their workers and supervisors."""

from lifecycle import plants

plants.plant()
