FLEET_ROW="fleet"
def fleet_curve(window_s, say): raise NotImplementedError
