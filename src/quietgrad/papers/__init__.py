"""What the papers print: formulas, tables, conditions; one file per paper. Nothing here is needed to train."""
