"""`starling runs`, `compare` and `report`: runs listed, compared and reported from their folders alone."""
