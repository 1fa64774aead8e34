"""The results of campaigns: the model, intervals, comparisons, what happened when. Pure, on loaded records."""
