"""The launcher `ray`: a placement group for each replica, whose processes run under actors."""
