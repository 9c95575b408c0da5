"""Request records as rows and events for other billing tools. Pure: records in, bounded pieces out.

Money stays integer nanos up to the decimal text of it, so that sums are the ledger's to the nano; ids follow
from the record alone, so that what is exported twice is one and the same row or event.

- `charges`: a record's cost by what is counted
- `decimals`: exact decimal text of integer amounts
- `exporter`: the formats, each as a stream of pieces
- `focus`: rows of FOCUS 1.2, the FinOps Open Cost and Usage Specification
- `lago`: events of Lago
- `moments`: moments as text
- `openmeter`: CloudEvents for OpenMeter
"""
