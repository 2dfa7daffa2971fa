"""ptdmpi compared with other trainers and with the time of its bare matrix multiplications"""
